"""A load test of a paged serving loop: requests, their schedule, and the engines that run it."""
