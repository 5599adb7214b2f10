"""Credentials in text that a verb prints: the last line of defence, whatever message or traceback they stand in."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"(^|[\s'\"=/]|https?:)[^\s/?#'\"\\:@]*:[^\s/?#'\"\\]*@(?=[^\s@'\"\\])", re.IGNORECASE)
_ONE_WORD = re.compile(r"([a-z][a-z0-9+.-]+:/+)[^\s/?#'\"\\]*@", re.IGNORECASE)
_QUERY = re.compile(r"(https?:/*[^\s?#'\"\\]*)[?#][^\s'\"\\]*", re.IGNORECASE)
_BEARER = re.compile(r"(\bBearer )[^\s'\"\\]+", re.IGNORECASE)


def redacted(text: str) -> str:
    """The text with user info and queries of URLs and bearer tokens removed, also of URLs that lack a part.

    >>> redacted("no https:/user:secret@host/x?token=1 there")
    'no https:/host/x there'
    """
    if "@" in text:
        text = _USER_INFO.sub(r"\1", _ONE_WORD.sub(r"\1", text))
    if "?" in text or "#" in text:
        text = _QUERY.sub(r"\1", text)
    return _BEARER.sub(r"\1", text) if "earer" in text else text
