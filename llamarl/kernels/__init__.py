"""CPU kernels in C++ for the few loops that torch has no fast operator for, each with a pure-torch fallback."""
