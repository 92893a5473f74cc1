"""The layers: parameters, constructors and their text. They call operations, never kernels."""
