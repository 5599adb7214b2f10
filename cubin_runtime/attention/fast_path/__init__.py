"""Fast paths: a call like an earlier one is launched from a table, without checks and plans.

The full path of an operator checks, plans and launches. While it runs it notes what it launched (``notes``), whose
addresses and numbers say which argument they are from (``provenance``). ``build`` makes the ``table`` of such calls:
what must hold for options and tensors (``guards``), and where each value of the launch comes from. A ``path`` walks the
table, in Python or by the accelerator in C; one of ``any_size`` is for calls that differ in sizes alone.
``operator_function`` tries an operator's ``paths`` before the full path, the only source of plans and of errors.
"""
