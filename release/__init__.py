"""What a release consists of: wheel, source archive, checksums, bill of materials and the changelog's section."""
