"""When jobs will be done: measured times in files, predictions from them, a simulation, and admission."""
