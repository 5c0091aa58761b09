"""What is run by hand or by `make`, and is no test: record, measure, repeat, break."""
