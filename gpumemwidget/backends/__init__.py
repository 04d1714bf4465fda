"""The only door to hardware: the protocols, and ``Hardware``, which joins all devices."""
