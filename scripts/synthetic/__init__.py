"""Parts of make_synthetic.py."""
