"""The parts of compare_llama_cpp.py: twins -> speed, quality -> rows -> report, plot; bursts measures a process."""
