"""The rules of the house, one module for each subject, and the reader of source code that they share.

A rule is a function that takes a `House` and yields its complaints. Each module ends with `PLANTED`: small houses that break
one of its rules, with a part of the complaint that must follow. `tests/test_house.py` runs every rule on this repository,
where it must find nothing, on a clean house, and on each planted one; `ALLOWED` holds what a rule must not blame.

    source      reads a repository into modules, scripts and documents; builds the planted houses
    floors      who may import whom
    layout      files, packages, names, tests that mirror the source, exports, versions
    statements  sizes of modules and functions, one statement a line, comments
    caches      what grows by calls has a bound
    messages    nothing reads the text of an error; the English of messages, docstrings and documents
"""
