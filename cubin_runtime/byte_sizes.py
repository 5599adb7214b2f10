"""Numbers of bytes for people."""


def size(count: int) -> str:
    """Bytes in powers of ten.

    >>> size(1651218689)
    '1.65 GB'
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} bytes"
