"""`atom-plugin doctor`: what would keep a server from running our models, above all what would do so silently."""
