"""A model as data: `config.json`, kinds of layers, the stored format."""
