"""The networks that are trained: a small GPT, a plain vision transformer and Hiera."""
