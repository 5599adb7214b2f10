"""Parts of the benchmark of context attention."""
