"""Model families and their maths, without Ray and HTTP."""
