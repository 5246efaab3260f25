"""What a step of an optimizer costs on many GPUs: a model, and runs that check it."""
