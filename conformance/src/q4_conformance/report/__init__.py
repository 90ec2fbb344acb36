"""The certificate of a run, in every form."""
