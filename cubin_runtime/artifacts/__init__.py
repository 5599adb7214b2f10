"""Artifacts: which releases are trusted, where files come from, where they are stored, and what they contain.

``api`` has the functions that the package exports; other folders of the package enter by ``library``. Files and
folders by job, each importing only those above it:

- ``path``, ``manifest``, ``bounded_read``, ``atomic_write``: values, and the one way to read and to write files
- ``audit_log``: lines of JSON about what came from where
- ``threads``: work in as many threads as the system gives
- ``zip_reader``: the members of a zip
- ``cubins``: facts of a cubin, from its ELF
- ``tables``: what a release states about its kernels
- ``pins``: which releases are trusted
- ``store``: verified objects by digest
- ``sources``: where bytes come from
- ``fetch``: from the sources into the store
- ``verification``, ``library``: all of it for one configuration
- ``releases``: operations on whole releases (catalog, comparison, export, gc, repair, targets)
- ``api``: fetch, load and verify by name

Other packages import ``library``, ``releases`` and the values of ``path``, ``manifest``, ``verification``, ``cubins``,
``tables`` and ``pins``; never the others. No two files import each other. ``tests/test_imports.py`` enforces all
of this.
"""
