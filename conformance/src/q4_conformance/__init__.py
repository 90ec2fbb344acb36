"""The kit that certifies any q4core backend: an oracle, a judge and a table of cases."""
