"""What a run leaves: the certificate, in every form."""
