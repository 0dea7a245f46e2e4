"""How the small shipped models were trained: drawn scenes, captions, auto-encoders, transformers, evaluation."""
