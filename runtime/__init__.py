"""hotcold.runtime: from a GGUF file to tokens. Read cli.py for the way in, engine.py for the way through."""
