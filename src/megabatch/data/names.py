"""Names that come from disks and archives, which may hold anything, and where they are printed or listed."""


def is_plain(name: str) -> bool:
    """Whether it can stand in a list of one name a line: no line breaks or the like, no bytes that are no text."""
    return not any(letter < " " or "\ud800" <= letter <= "\udfff" for letter in name)


def one_line(text: str) -> str:
    """For messages."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
