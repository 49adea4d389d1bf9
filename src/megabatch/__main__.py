from megabatch.cli.app import main

main()
