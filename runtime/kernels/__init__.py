"""Kernels: pure functions of arrays, addresses and scalars. reference.py holds the NumPy truth of each."""
