/* printable.h - text from elsewhere, made fit for a terminal. */
#ifndef TD_BASE_PRINTABLE_H
#define TD_BASE_PRINTABLE_H

/* Control characters (C0 with line ends and tabs, DEL, C1) and bytes that are not UTF-8 become '?',
 * in place. For names, reasons and errors that come from other machines or from files: a terminal
 * would execute the control sequences in them. Any thread. */
void td_make_printable(char *text);

#endif
