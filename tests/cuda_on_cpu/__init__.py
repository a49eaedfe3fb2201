"""A GPU made of the CPU: kernels compiled by g++ with cuda_shim.h, and SimDevice, which keeps to the protocol."""
