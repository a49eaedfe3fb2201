"""The parts of compare_llama_cpp.py: twins -> speed, quality -> report; bursts measures a process."""
