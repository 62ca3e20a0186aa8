"""Speed and memory of the operations beside their peers: `rankone bench ops`.

cases      what is measured, and its inputs
peers      every implementation by one name and one way to be called
parity     outputs and gradients beside float64
clock      milliseconds, on the processor and on the GPU
memory     the most memory that a pass needs
ops        the run: parity, times, memory, a file after every case
summary    ratios, exponents, the tables
plots      time and memory against T
docs_page  the tables in docs/operations.md and docs/kernels.md
compiled   what the compiler makes of the kernels: `rankone bench kernels`
"""
