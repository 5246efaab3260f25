from eigenstep_lab.store import without_words

PROGRAM = '''"""Module."""

WIDTH = 3
"""How wide."""


def double(x):
    """Return twice a number."""
    return 2 * x  # a comment
'''


def test_words_do_not_change_a_program() -> None:
    assert without_words(PROGRAM) == without_words("WIDTH = 3\ndef double(x): return 2*x")


def test_numbers_and_strings_that_are_used_do() -> None:
    assert without_words(PROGRAM) != without_words(PROGRAM.replace("2 * x", "3 * x"))
    assert without_words("x = 'a'") != without_words("x = 'b'")
