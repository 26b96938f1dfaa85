"""Files of models, of any maker: what they hold, and how weights are stored in them."""
