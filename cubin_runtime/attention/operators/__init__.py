"""One file per operator: its declaration, the rules of a call, its launches, its plan and its function."""
