"""Fetching objects from the sources into the store."""
