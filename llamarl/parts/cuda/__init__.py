"""Everything that only a CUDA device needs: kernels in Triton, steps as CUDA graphs, weights by NIXL."""
