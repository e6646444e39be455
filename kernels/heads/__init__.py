"""Operations on the heads of queries and keys."""
