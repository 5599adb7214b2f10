"""Steps of transformers' models, for the benchmark of their attention."""
