"""An archive of images judged anew: found, judged in groups, written as Parquet, compared with earlier verdicts."""
