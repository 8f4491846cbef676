"""What tests and scripts share: `cases` enumerates the calls that real models make, `compare` judges results."""
