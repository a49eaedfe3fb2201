"""The parts of benchmarks.py: figures -> models, runs -> results in JSON -> page."""
