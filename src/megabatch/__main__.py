from megabatch.cli import main

main()
