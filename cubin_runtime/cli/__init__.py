"""The command line: one file a verb family, each verb one call into the package."""
