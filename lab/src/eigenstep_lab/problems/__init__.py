"""What is optimized: test functions, problems over positive-definite matrices, small networks with
their data.
"""
