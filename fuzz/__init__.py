"""Coverage-guided fuzzing with atheris: ``make fuzz``, or ``python -m fuzz --seconds 600``.

Two targets run one after the other, each for half the time: :mod:`fuzz.bodies` and :mod:`fuzz.streams`. An input that
fails is kept in ``fuzz/findings``; give it to the target again with ``python -m fuzz.bodies fuzz/findings/crash-…``.
"""
