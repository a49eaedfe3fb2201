"""hotcold.placement: which neurons are hot and where they live. Comes with profiling; nothing here yet."""
