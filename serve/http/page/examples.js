/** Texts to begin with: one of each kind that the corpora of this repository hold, and a piece of news. */

export const EXAMPLES = [
  {
    name: "Package description",
    text:
      "This program finds photographs that a collection holds more than once. It compares pictures by what they show " +
      "and not by their bytes, so copies that were scaled, cropped or saved in another format are found as well. " +
      "The results can be looked at side by side in a window, or written to a list that other programs read.",
  },
  {
    name: "Restaurant facts",
    text:
      "name[Copper Fox], type[pub], food[Thai], area[riverside], price[cheap], rating[four stars], family[yes], " +
      "near[the bridge]",
  },
  {
    name: "News",
    text:
      "The old swimming pool in the harbour quarter will open again in June after three years of repairs, the town " +
      "council said on Tuesday. The roof had been closed off when engineers found rust in its beams. The work cost " +
      "four million, a fifth more than planned, and half of it was paid by a fund for public sports. Entry will stay " +
      "free for children under ten. A swimming club that had moved to a lake nearby plans to return in the autumn.",
  },
];
