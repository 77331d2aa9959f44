"""Small functions of Transformer Engine that scripts import; te_fast's layers use none of them."""
