"""Model families and their maths. Nothing here knows Ray or HTTP."""
