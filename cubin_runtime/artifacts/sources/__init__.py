"""Where bytes come from; none of it is trusted."""
