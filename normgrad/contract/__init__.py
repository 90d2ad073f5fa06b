"""The vocabulary that the operators share: views, dtypes, rules, status codes, products, plans, streams."""
