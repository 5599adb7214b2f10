"""The kernel that measures read bandwidth."""
