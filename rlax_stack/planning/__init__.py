"""What a config needs and costs on machines that are not at hand: compiled, counted and modelled, never measured."""
