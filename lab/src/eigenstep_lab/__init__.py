"""What the studies need: datasets, small models, optimizers by name, benchmarks. Not imported by the library."""
