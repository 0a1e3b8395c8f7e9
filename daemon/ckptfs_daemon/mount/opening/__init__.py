"""One open or create: its values, its attempts and its acts."""
