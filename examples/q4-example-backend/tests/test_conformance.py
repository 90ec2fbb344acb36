"""Certification of the backend: one test for each case of the contract."""

import pytest


@pytest.mark.q4_conformance("example-backend")
def test_conformance(q4_case):
    """The case holds; `pytest --q4-report DIR` writes the certificate."""
    q4_case.check()
